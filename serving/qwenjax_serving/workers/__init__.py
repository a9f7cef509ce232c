"""The workers: processes with a mesh and an engine each, which a router tells what to do."""
