"""The storage tier: an interface, the Redis store, and decorators around it, one concern a file."""
