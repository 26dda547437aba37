"""A live request goes from one manager to another, on another machine if need be.

The owner offers (lease.py): blocks are held, the state is gathered, and an offer (offer.py) says
where all of it lies. The taker reads (arrival.py) through a link (link.py) and asks the owner's
memory whether the offer still stands, after the last byte has come: only then is it believed.
Nobody ever writes into another machine's memory.
"""
