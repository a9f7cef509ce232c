"""The engine: requests in, tokens out, over the programs that run on a mesh."""
