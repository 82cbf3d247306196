"""Object storage: a local directory or an S3 bucket, behind one interface (`base.ObjectStore`).

Knows nothing of backups. Imports of tikv_br only the errors, cancellation, retries and the protobuf messages.

Modules, in reading order:

- `url`: storage URLs and `StorageLocation`
- `base`: the interface of all object stores, and ranged, decrypted reads of one object
- `open`: opens the store at a location
- `local`: a directory
- `s3`, `s3_writer`: an S3 bucket, and uploads of large objects
- `outage`: waits for a location that does not answer
- `credentials`: S3 credentials and region, and the location as a message for stores
- `crypter`: secrets, and AES-CTR encryption
"""
