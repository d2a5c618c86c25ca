"""Dashboards: their panels as data, Grafana's JSON of them, and a Prometheus in which all their queries are asked."""
