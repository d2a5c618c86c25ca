"""``scissorhands up``: store, manager and worker as processes of this machine, under one supervisor."""
