"""The pure state machines: an event goes in, effects come out; no clock, no I/O."""
