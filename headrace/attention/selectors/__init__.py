"""Selectors of key blocks for heads that attend to selected blocks of their prompt, one file each."""

from headrace.attention.selectors import mean as mean
from headrace.attention.selectors import xattn as xattn
from headrace.attention.selectors.registry import Selector as Selector
from headrace.attention.selectors.registry import configure as configure
from headrace.attention.selectors.registry import create as create
from headrace.attention.selectors.registry import register as register
