"""Prometheus metrics of one server."""

from moestro.metrics.server_metrics import CONTENT_TYPE, FinishedRequest, ServerMetrics

__all__ = ["CONTENT_TYPE", "FinishedRequest", "ServerMetrics"]
