"""Routing: which replica serves a request, and when it is sent. Pure: no clock, no I/O, no process."""

from headrace.routing.loads import Capacity, Loads
from headrace.routing.policies import Policy, make_policy
from headrace.routing.prefix_index import STRIDE, CacheReport, CacheReporter, RoutedPrefixes, prefix_keys
from headrace.routing.router import Binding, Router, RouterStats, RoutingDecision

__all__ = [
    "STRIDE",
    "Binding",
    "CacheReport",
    "CacheReporter",
    "Capacity",
    "RoutingDecision",
    "Loads",
    "Policy",
    "RoutedPrefixes",
    "Router",
    "RouterStats",
    "make_policy",
    "prefix_keys",
]
