"""Events that routers read: which blocks are cached where. docs/events.md.

wire        the messages, in vLLM's format
ledger      which blocks consumers know, in which medium; makes events from notes
sender      the thread with the sockets: publishes, keeps the newest batches, replays
publisher   listens to a manager's prefix cache and tiers, and passes notes to the sender
"""
