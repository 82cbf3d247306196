"""Object storage: a local directory, or a bucket in a cloud, behind one interface (`base.ObjectStore`).

Knows nothing of backups. Imports of tikv_br only the errors, cancellation, retries and the protobuf messages.

Modules, in reading order:

- `url`: options of the clouds, storage URLs and `StorageLocation`
- `base`: the interface of all object stores, and ranged, decrypted reads of one object
- `open`: opens the store at a location
- `local`: a directory
- `request_failure`, `cloud`: requests to any cloud, how they fail, and uploads of large objects
- `clouds`: what is special to S3, GCS and Azure
- `outage`: waits for a location that does not answer
- `credentials`: credentials, S3's region, and the location as a message for stores
- `crypter`: secrets, and AES-CTR encryption
"""
