-- KEYS: pins. ARGV: owner. Answers how many exemplars of this task the owner no longer holds.
local freed, prefix = 0, ARGV[1] .. '|'
for _, name in ipairs(redis.call('HKEYS', KEYS[1])) do
  if string.sub(name, 1, #prefix) == prefix then
    local pinned = string.sub(name, #prefix + 1)
    redis.call('HDEL', KEYS[1], name)
    if redis.call('HINCRBY', KEYS[1], pinned, -1) <= 0 then redis.call('HDEL', KEYS[1], pinned) end
    freed = freed + 1
  end
end
return freed
