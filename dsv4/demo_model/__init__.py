"""The trained demo model: a tiny V4 that answers questions about this cache. To change

its weights and layers    network.py; cached.py runs them on the cache, parallel.py without one
what it reads and writes  text.py: tokens and the chat template
which files it has        checkpoint.py; they are in dsv4/data/demo_model and dsv4/data/recall_model
how it is trained         tools/train_demo.py
"""
