"""EdgePipe (Yoon et al., "EdgePipe: Tailoring Pipeline Parallelism With Deep Neural Networks for Volatile Wireless
Edge Devices", IEEE Internet of Things Journal, 2022): its plans, as pure functions. Nothing trains by them yet.

Layers are numbered from 0, the input layer, whose neurons are the values of a sample; batches from 0. The paper counts
both from 1.
"""
