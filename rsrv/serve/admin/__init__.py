"""Live administration: what an operator may ask of a server that runs, over HTTP and gRPC alike."""
