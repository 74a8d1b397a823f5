"""Objects in a bucket of S3 (or what speaks its protocol), Google Cloud Storage or Azure, by the library obstore.

object_backend   what an s3, gs or az URL may say
object_storage   `ObjectStorage`: the calls of a storage as requests, and what their answers mean
bucket           the library: how it is set up, which key has an object, what its errors mean
known            which names are there, as far as this process has seen
calls            requests of one call on a few threads, for as long as its caller waits
"""
