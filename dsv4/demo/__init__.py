"""`dsv4 demo` (dsv4/cli/demo.py runs it). To change

what it does            run.py: alone.py, then story.py with prefix.py and restart.py
what it asks            prompts.py; model.py has the models, dsv4/demo_model the trained one
what it reports         events.py; watch.py makes the events of a forward
what people see         screen.py for the terminal, picture.py for --plot
the costs at the end    bill.py
"""
