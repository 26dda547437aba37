"""`dsv4 demo` (dsv4/cli/demo.py runs it). To change

what it does            story.py, and prefix.py for its last part; model.py has the model
what it reports         events.py; watch.py makes the events of a forward
what people see         screen.py for the terminal, picture.py for --plot
the costs at the end    bill.py
"""
