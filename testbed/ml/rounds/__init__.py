"""What methods share that train one model on the data of several devices: planning, programs, figures."""
