"""Attention that reads K/V from the pool's blocks: one module a device."""
