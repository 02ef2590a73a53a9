-- KEYS: exemplars, scores. ARGV: count. Answers the entries of the highest scores, best first.
local ids = redis.call('ZREVRANGE', KEYS[2], 0, ARGV[1] - 1)
local found = {}
for rank, id in ipairs(ids) do found[rank] = redis.call('HGET', KEYS[1], id) end
return found
