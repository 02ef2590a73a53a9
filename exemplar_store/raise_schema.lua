-- KEYS: meta. ARGV: from, to. Raises the store's schema unless somebody else has. Answers 1 when it did.
if redis.call('HGET', KEYS[1], 'schema') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'schema', ARGV[2])
return 1
