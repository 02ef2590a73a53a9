-- KEYS: islands. ARGV: arrivals at which a reset is due, then for each island to empty its number and the id of its
-- founder, or '-' when the founder is on all islands anyway. Answers 1, or 0 when another process was first.
-- The field '#' counts arrivals since the last reset; the others are 'id -> islands it is on, as ,0,3,'.
if tonumber(redis.call('HGET', KEYS[1], '#') or '0') < tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], '#', 0)
local flat = redis.call('HGETALL', KEYS[1])
for at = 2, #ARGV, 2 do
  for field = 1, #flat, 2 do
    if flat[field] ~= '#' then flat[field + 1] = string.gsub(flat[field + 1], ',' .. ARGV[at] .. ',', ',') end
  end
end
for field = 1, #flat, 2 do
  if flat[field] ~= '#' then
    for at = 2, #ARGV, 2 do
      if ARGV[at + 1] == flat[field] then flat[field + 1] = flat[field + 1] .. ARGV[at] .. ',' end
    end
    redis.call('HSET', KEYS[1], flat[field], flat[field + 1])
  end
end
return 1
