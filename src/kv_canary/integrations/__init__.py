"""One small file an engine. Each imports its engine only when it is called."""
