"""The command line's subcommands, a module each: add_arguments(parser), and run(arguments) -> exit status."""
