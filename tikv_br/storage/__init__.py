"""Objects by name at a place: a local directory or an S3 bucket, behind one seam (`base.ObjectStore`).

Knows nothing of backups; imports nothing of tikv_br but the errors and, for `backend`, the wire messages.
"""
