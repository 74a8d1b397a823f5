"""Objects in a Redis server or cluster (or one that speaks its protocol, such as Valkey), as an outsider would add it.

redis_backend   what a redis or rediss URL may say
redis_storage   `RedisStorage`: the calls of a storage as commands of Redis, and what its answers mean
servers         the client library: which server has a key, how a connection is made (TLS, password, cluster)
wire            one connection, on which payloads go from and to the caller's buffers without a copy
"""
