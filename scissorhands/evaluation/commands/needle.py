"""``scissorhands eval needle``."""

from scissorhands.evaluation.commands.retrieval import retrieval_command

command = retrieval_command(
    "needle", "Whether a sentence that was hidden in a text is found: the answer must contain the word."
)
