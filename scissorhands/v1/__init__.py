"""Generated from proto/scissorhands/v1; see scripts/generate_proto.sh."""
