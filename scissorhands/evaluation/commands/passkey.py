"""``scissorhands eval passkey``."""

from scissorhands.evaluation.commands.retrieval import retrieval_command

command = retrieval_command(
    "passkey", "Whether a number that was hidden in a text is found: the answer must be the number."
)
