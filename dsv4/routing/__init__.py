"""Which replica gets a request, by what each has cached: the library of every router here.
Torch-free.

names      the names of a prompt's blocks, as the replicas' events say them
where      which replica has which blocks in which medium: bounded, fed by events
router     chooses: what a replica has of the prompt, how busy it is, where the session was
"""
