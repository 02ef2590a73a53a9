-- KEYS: scored. ARGV: group. Makes the stream and its consumer group, from the first entry on, unless they exist.
if redis.call('EXISTS', KEYS[1]) == 1 then
  for _, info in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    for at = 1, #info, 2 do
      if info[at] == 'name' and info[at + 1] == ARGV[1] then return 0 end
    end
  end
end
redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
return 1
