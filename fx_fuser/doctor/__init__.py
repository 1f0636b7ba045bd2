"""The doctor, `python -m fx_fuser`: is this machine fit, what does it get, and is it right?"""
