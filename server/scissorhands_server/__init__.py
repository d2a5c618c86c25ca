"""The servers of Scissorhands: the worker, the cache manager and what they share."""
