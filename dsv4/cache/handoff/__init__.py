"""Moves a live request from one manager to another, also on another machine.

The owner offers (lease.py): blocks are held, the state is gathered, and an offer (offer.py) says
where all of it lies. The taker reads (arrival.py) through a link (link.py), and after the last byte
checks in the owner's memory whether the offer still stands: only then is it used. No machine ever
writes into another machine's memory.
"""
