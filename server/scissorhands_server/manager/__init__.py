"""The cache manager: grants budgets, plans evictions, keeps the ledger and owns the store. numpy only, no torch."""
