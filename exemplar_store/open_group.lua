-- KEYS: group, done, ledger. ARGV: group id, size, packed prompt, island its samples are born on as ',k,' or ''.
-- Answers 1 when the group is new, 0 when it was opened before, -1 when it was opened with another size.
if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then return 0 end
local size = redis.call('HGET', KEYS[1], 'size')
if size then return size == ARGV[2] and 0 or -1 end
redis.call('HSET', KEYS[1], 'size', ARGV[2], 'left', 0, 'prompt', ARGV[3])
if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'island', ARGV[4]) end
redis.call('HINCRBY', KEYS[3], 'dispatched', ARGV[2])
return 1
