"""``scissorhands doctor``: whether this machine has what the processes need, and what to do where it has not."""
