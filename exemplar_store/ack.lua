-- KEYS: scored, fence. ARGV: token, group, entry ids. Answers how many were pending, or -1 under a stale token.
if (redis.call('GET', KEYS[2]) or '0') ~= ARGV[1] then return -1 end
local acked = 0
for at = 3, #ARGV do
  acked = acked + redis.call('XACK', KEYS[1], ARGV[2], ARGV[at])
  redis.call('XDEL', KEYS[1], ARGV[at])
end
return acked
