-- KEYS: exemplars, pins. ARGV: owner, shelf, exemplar id. Answers 1 pinned, 0 pinned before, -1 no such exemplar.
if redis.call('HEXISTS', KEYS[1], ARGV[3]) == 0 then return -1 end
local pinned = ARGV[2] .. '|' .. ARGV[3]
if redis.call('HSETNX', KEYS[2], ARGV[1] .. '|' .. pinned, 1) == 0 then return 0 end
redis.call('HINCRBY', KEYS[2], pinned, 1)
return 1
