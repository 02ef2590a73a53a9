-- KEYS: scored, fence. ARGV: token, group, consumer, start, count. Answers status, where to go on, entries.
if (redis.call('GET', KEYS[2]) or '0') ~= ARGV[1] then return {-1, '0-0', {}} end
local got = redis.call('XAUTOCLAIM', KEYS[1], ARGV[2], ARGV[3], 0, ARGV[4], 'COUNT', ARGV[5])
return {1, got[1], got[2]}
