"""Objects in a bucket of S3 (or what speaks its protocol), Google Cloud Storage or Azure, by the library obstore.

_object_backend   what an s3, gs or az URL may say
_object_storage   `ObjectStorage`: the calls of a storage as requests, and what their answers mean
_bucket           the library: how it is set up, which key has an object, what its errors mean
_bucket_upkeep    stat, ls, verify, gc, drop for people
_known            which names are there, as far as this process has seen
_calls            requests of one call on a few threads, for as long as its caller waits
"""
