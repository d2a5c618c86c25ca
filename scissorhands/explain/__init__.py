"""The command ``scissorhands explain``: a page that shows what a budget remembers of a text."""
