-- KEYS: relayed, scored. ARGV: group id, packed group. Appends the group unless it was appended before.
if redis.call('SADD', KEYS[1], ARGV[1]) == 0 then return false end
return redis.call('XADD', KEYS[2], '*', 'group', ARGV[1], 'packed', ARGV[2])
