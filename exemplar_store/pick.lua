-- KEYS: exemplars, scores. ARGV: for each pick the bucket's low and exclusive high bound and a place within it.
-- Answers the entries. A bucket that shrank since it was counted gives its last exemplar, an empty one nothing.
local found = {}
for at = 1, #ARGV, 3 do
  local low, high, place = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
  local count = redis.call('ZCOUNT', KEYS[2], low, high)
  if count > 0 then
    place = math.min(place, count - 1)
    local id = redis.call('ZRANGEBYSCORE', KEYS[2], low, high, 'LIMIT', place, 1)[1]
    found[#found + 1] = redis.call('HGET', KEYS[1], id)
  end
end
return found
