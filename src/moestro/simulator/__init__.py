"""The engine's own scheduler and KV policy under a virtual clock: real traces, no model."""
