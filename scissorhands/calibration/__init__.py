"""Calibration: measuring what eviction costs in each KV head of a model (:mod:`scissorhands.profile`).

The expected Kullback-Leibler divergence of the model's predictions from those of the full cache is expanded to the
second order in what eviction changes of the attention outputs. Its curvature is the Fisher information, as in Fisher
pruning (Theis et al. 2018, arXiv 1801.05787; Molchanov et al. 2019, arXiv 1906.10771): a change ``d`` of one output
costs ``E[(g . d)^2] / 2`` nats, where ``g`` is the gradient of the log-probability of a token that the model itself
draws. :mod:`~scissorhands.calibration.fisher` records ``g``, :mod:`~scissorhands.calibration.replay` finds ``d``.
"""
