-- KEYS: scored, fence. ARGV: token, group, consumer, count, last entry this consumer got.
-- Answers status, entries, last entry delivered to anyone. Status -1: stale token.
-- What was delivered to this consumer after `last` is an answer that was lost on its way: it comes first.
if (redis.call('GET', KEYS[2]) or '0') ~= ARGV[1] then return {-1, {}, ''} end
local function read(from)
  local got = redis.call('XREADGROUP', 'GROUP', ARGV[2], ARGV[3], 'COUNT', ARGV[4], 'STREAMS', KEYS[1], from)
  return got and got[1] and got[1][2] or {}
end
local entries = read(ARGV[5])
if #entries == 0 then entries = read('>') end
local delivered = ''
if #entries == 0 then
  for _, info in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    local fields = {}
    for at = 1, #info, 2 do fields[info[at]] = info[at + 1] end
    if fields['name'] == ARGV[2] then delivered = fields['last-delivered-id'] end
  end
end
return {1, entries, delivered}
