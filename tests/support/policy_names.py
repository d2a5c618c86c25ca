"""Policies that gather every kind of evidence."""

POLICIES = [
    "scissorhands",
    "scissorhands:counts",
    "scissorhands:paper",
    "h2o",
    "tova",
    "snapkv",
    "r-kv",
    "fastgen",
    "expected-attention",
    "streaming",
    "protected:tova",
    "merged:h2o",
]
