"""Whether cluster, storage and this machine are fit for the work: many small probes, each with a verdict and advice.

Imports the engines; writes nothing but one scratch folder of the storage, which it removes.
"""
