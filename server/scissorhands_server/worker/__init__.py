"""The worker: runs a model under a hard cache budget."""
