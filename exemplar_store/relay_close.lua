-- KEYS: group, done, outbox. ARGV: group id. The group is in `scored`: its state can go, its name stays.
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('SREM', KEYS[3], ARGV[1])
redis.call('DEL', KEYS[1])
return 1
