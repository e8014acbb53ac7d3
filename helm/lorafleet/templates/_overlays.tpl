{{/* Overlays: what values change in the objects that the chart makes, as a strategic merge patch of Kubernetes does.

Maps merge. null removes a field. Lists whose items have a merge key merge by it; the rest of the chart's items stay, new
ones come last. Any other list replaces the chart's, unless the overlay has a map in its place, whose keys are the
positions of the items to change: {rules: {"0": {timeouts: null}}}. `$patch: delete` removes an item of a list with a merge
key, `$patch: replace` replaces a map or an item. */}}

{{/* Merge keys of lists, by the field's name; the first that all items have.
source  kubernetes 1.37 core/v1 types.go, patchMergeKey; KEDA's triggers have no such mark, and names */}}
{{- define "lorafleet.mergeKeys" -}}
containers: [name]
initContainers: [name]
env: [name]
volumes: [name]
volumeMounts: [mountPath]
volumeDevices: [devicePath]
ports: [containerPort, port]
imagePullSecrets: [name]
secrets: [name]
hostAliases: [ip]
resourceClaims: [name]
schedulingGates: [name]
topologySpreadConstraints: [topologyKey]
triggers: [name]
{{- end }}

{{/* Changes `into`, a map, by `from`; gives nothing. (dict "into" $object "from" $overlay) */}}
{{- define "lorafleet.patch" -}}
{{- $into := .into -}}
{{- range $field, $new := .from -}}
{{- $old := get $into $field -}}
{{- if kindIs "invalid" $new -}}
{{- $_ := unset $into $field -}}
{{- else if and (kindIs "map" $new) (kindIs "slice" $old) -}}
{{- $_ := set $into $field (include "lorafleet.patchedItems" (dict "old" $old "new" $new) | fromYamlArray) -}}
{{- else if kindIs "map" $new -}}
{{- if or (not (kindIs "map" $old)) (eq (get $new "$patch") "replace") -}}
{{- $old = dict -}}
{{- $_ := set $into $field $old -}}
{{- end -}}
{{- include "lorafleet.patch" (dict "into" $old "from" (omit $new "$patch")) -}}
{{- else if kindIs "slice" $new -}}
{{- $_ := set $into $field (include "lorafleet.patchedList" (dict "field" $field "old" (ternary $old list (kindIs "slice" $old)) "new" $new) | fromYamlArray) -}}
{{- else -}}
{{- $_ := set $into $field $new -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The list with the items at these positions changed, as YAML. (dict "old" $list "new" (dict "0" (dict ...))) */}}
{{- define "lorafleet.patchedItems" -}}
{{- $items := list -}}
{{- range $at, $old := .old -}}
{{- $wrapped := dict "item" (deepCopy $old) -}}
{{- if hasKey $.new (toString $at) -}}
{{- include "lorafleet.patch" (dict "into" $wrapped "from" (dict "item" (get $.new (toString $at)))) -}}
{{- end -}}
{{- if hasKey $wrapped "item" -}}{{- $items = append $items $wrapped.item -}}{{- end -}}
{{- end -}}
{{- toYaml $items -}}
{{- end }}

{{/* The list after the overlay's, as YAML. (dict "field" "env" "old" $list "new" $list) */}}
{{- define "lorafleet.patchedList" -}}
{{- $all := concat .old .new -}}
{{- $key := "" -}}
{{- range get (include "lorafleet.mergeKeys" . | fromYaml) .field | default list -}}
{{- $candidate := . -}}
{{- $isKey := not $key -}}
{{- range $all -}}{{- if not (kindIs "map" .) -}}{{- $isKey = false -}}{{- else if not (hasKey . $candidate) -}}{{- $isKey = false -}}{{- end -}}{{- end -}}
{{- if $isKey -}}{{- $key = $candidate -}}{{- end -}}
{{- end -}}
{{- if not $key -}}
{{- toYaml .new -}}
{{- else -}}
{{- $items := dict -}}
{{- $order := list -}}
{{- range .old -}}
{{- $name := get . $key | toString -}}
{{- $_ := set $items $name (deepCopy .) -}}
{{- $order = append $order $name -}}
{{- end -}}
{{- range .new -}}
{{- $name := get . $key | toString -}}
{{- if eq (get . "$patch") "delete" -}}
{{- $_ := unset $items $name -}}
{{- else -}}
{{- include "lorafleet.patch" (dict "into" $items "from" (dict $name .)) -}}
{{- $order = append $order $name -}}
{{- end -}}
{{- end -}}
{{- $list := list -}}
{{- range uniq $order -}}{{- if hasKey $items . -}}{{- $list = append $list (get $items .) -}}{{- end -}}{{- end -}}
{{- toYaml $list -}}
{{- end -}}
{{- end }}

{{/* The overlay for each kind of object; a workload's pods have one of their own, `pod`. */}}
{{- define "lorafleet.overlayNames" -}}
Deployment: workload
StatefulSet: workload
Pod: pod
Service: service
Ingress: ingress
HTTPRoute: httpRoute
PodDisruptionBudget: disruptionBudget
HorizontalPodAutoscaler: autoscaler
ScaledObject: autoscaler
ServiceAccount: serviceAccount
{{- end }}

{{/* Manifests with the overlays of one part of the release, in this order; as they are where no overlay is about them.
(dict "text" $manifests "overlays" (list .Values.router.overlays)) */}}
{{- define "lorafleet.overlaid" -}}
{{- $overlays := compact .overlays -}}
{{- if not $overlays -}}
{{- .text -}}
{{- else -}}
{{- range $text := regexSplit "(?m)^---$" .text -1 -}}
{{- $object := fromYaml $text -}}
{{- $name := get (include "lorafleet.overlayNames" $ | fromYaml) (get $object "kind") -}}
{{- $isChanged := false -}}
{{- range $overlays -}}
{{- with get . $name -}}
{{- include "lorafleet.patch" (dict "into" $object "from" .) -}}
{{- $isChanged = true -}}
{{- end -}}
{{- if and .pod (eq $name "workload") -}}
{{- include "lorafleet.patch" (dict "into" $object.spec.template "from" .pod) -}}
{{- $isChanged = true -}}
{{- end -}}
{{- end -}}
{{- if $object }}
---
{{ ternary (toYaml $object) (trim $text) $isChanged }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
