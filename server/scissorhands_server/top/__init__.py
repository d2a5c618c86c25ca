"""``scissorhands top``: what the dashboards show, live in the terminal."""
