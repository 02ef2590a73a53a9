-- KEYS: meta. ARGV: field, value, ... for a store that does not exist yet. Answers the fields that stand.
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('HSET', KEYS[1], unpack(ARGV)) end
return redis.call('HGETALL', KEYS[1])
